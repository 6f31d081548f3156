"""`python -m gpu_turnstile` is `turnstile`."""

from gpu_turnstile.cli.main import main

if __name__ == "__main__":
    main()
