;; 11: a memory of 64 bits.
(component
  
  (core module $main
    (memory (export "memory") i64 1)
    (func (export "run") (result i32) i32.const 0))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
