"""Parameters, gradients and optimizer state that live off the device and are copied in when needed."""
