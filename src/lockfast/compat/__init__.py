"""Drop-in faces for people who come from other libraries: their names, lockfast behind them."""
