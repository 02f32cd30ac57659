"""`python -m worker` is `kp-worker`."""

from worker.cli import main

if __name__ == "__main__":
    main()
