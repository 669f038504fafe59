"""What type checkers must accept and what they must refuse."""
