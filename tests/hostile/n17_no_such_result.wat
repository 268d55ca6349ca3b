;; 17: a result that is neither success nor error.
(component
  
  (core module $main
    
    (memory (export "memory") 1)
    (func (export "run") (result i32) (i32.store8 (i32.const 0) (i32.const 7)) i32.const 0))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
