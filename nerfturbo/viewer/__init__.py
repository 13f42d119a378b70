"""A live page of a scene, while it trains and afterwards."""
