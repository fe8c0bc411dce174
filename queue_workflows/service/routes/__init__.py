"""Group the endpoints' modules, one for each noun; `service.application` includes their routers."""
