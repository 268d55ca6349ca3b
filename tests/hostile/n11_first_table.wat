;; 11: wants a table of 2^32 - 1 elements from the start.
(component
  
  (core module $main
    (table 0xffffffff funcref)
    (memory (export "memory") 1)
    (func (export "run") (result i32) i32.const 0))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
