"""The engines behind `ports.Store`, one folder or file each. Imported only when a target asks for them."""
