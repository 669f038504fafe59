"""What this queue promises, as tests that anybody can run on their own database::

    pytest --pyargs cyclone_sqla.testing.conformance --cyclone-database-url postgresql://…

It works in a schema of its own there, beside a SQLite file in a file of its own, and removes it at
the end; without a URL it runs on a temporary SQLite file. The cases speak to
:class:`cyclone_sqla.port.Queue` alone.
"""
