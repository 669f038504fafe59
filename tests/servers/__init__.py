"""Database servers that the tests start, stop, freeze and kill themselves."""
