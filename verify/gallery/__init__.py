"""The gallery of broken locks, and good ones to compare with; run by the explorer."""
