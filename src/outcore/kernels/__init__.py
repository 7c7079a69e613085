"""Every Triton kernel of the project; each is launched by the module of the same name in the package that uses it."""
