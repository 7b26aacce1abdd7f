"""`python -m encke` is the command line."""

from encke.cli import main

if __name__ == "__main__":
    main()
