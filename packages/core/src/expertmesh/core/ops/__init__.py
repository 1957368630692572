"""One file per operation: formula, reference, sharding rule, public function, VJP."""
