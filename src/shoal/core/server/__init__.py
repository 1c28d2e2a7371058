"""The server: one replica of a stage, its hops, its books and the activations that it keeps."""
