"""Not shipped: explorer, simulator, models, virtual server and gallery, which check the code that is."""
