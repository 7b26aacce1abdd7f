"""`python -m halley` is the command line."""

from halley.cli import main

if __name__ == "__main__":
    main()
