"""`python -m cyclone_sqla` is `cyclone-sqla`."""

from cyclone_sqla.cli import main

if __name__ == "__main__":
    main()
