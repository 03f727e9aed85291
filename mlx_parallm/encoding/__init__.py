"""Which inputs an encoder takes next, and what its vectors are made of; pure Python."""
