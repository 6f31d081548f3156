"""`turnstile demo`: a scripted minute of mixed traffic through a real gate, on engines that need no GPU."""
