"""Worker processes: one protocol to start them, exchange messages with them and end them."""
