"""The tests of cyclone-sqla; they share `databases`, `servers`, `waiting` and `conftest`."""
