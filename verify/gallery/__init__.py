"""The gallery: broken locks that the explorer catches, and correct locks for comparison."""
