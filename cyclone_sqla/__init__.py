"""A durable, ordered, transactional job queue inside your own SQLAlchemy database."""
