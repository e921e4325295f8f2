"""`python -m meshinfer`, for where the command is not on the path."""

from meshinfer.front.cli import main

if __name__ == "__main__":
    main()
