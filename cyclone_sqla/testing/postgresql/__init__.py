"""A PostgreSQL server for tests, started from the programs that are at hand and gone after them."""
