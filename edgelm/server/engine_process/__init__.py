"""The engine process of a front: one model, served over HTTP on a private socket."""
