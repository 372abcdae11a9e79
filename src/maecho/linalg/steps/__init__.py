"""The steps of MA-Echo at one layer, and where they end."""
