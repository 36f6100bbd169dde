"""The whole story on an embedded tiny policy: see `story.run`."""
