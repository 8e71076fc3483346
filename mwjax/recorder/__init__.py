"""``mwjax record``: a proxy between a harness and an engine that writes every call down and changes nothing."""
