"""Models that other people wrote, for tests that must hold for any network."""
