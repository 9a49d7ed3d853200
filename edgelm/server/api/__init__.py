"""The APIs of the endpoint, a module for each."""
