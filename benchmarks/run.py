"""`make bench`: every CPU benchmark, one after the other."""

from benchmarks import engine


def main() -> None:
    engine.main()


if __name__ == "__main__":
    main()
