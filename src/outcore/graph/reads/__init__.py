"""What a recording read from Python and wrote to the model, compared at every replay."""
