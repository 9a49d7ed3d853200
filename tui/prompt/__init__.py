"""The box in which a message is written, and what belongs to the message: files, paths, the room for them."""
