"""`python -m experiments.fuzz`."""

from experiments.fuzz.command import main


if __name__ == "__main__":
    main()
