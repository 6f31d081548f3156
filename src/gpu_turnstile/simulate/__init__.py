"""The scheduler in simulated time: the real `core`, made-up or recorded clients, and what others would have done."""
