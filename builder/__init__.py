"""The builder: family folder → engine folder, for one target."""
