"""The server as a service of the user's session: started by the system, and ended by it."""
