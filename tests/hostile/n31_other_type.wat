;; 31: a known function of another type.
(component
  (import "nodus:gpu/job@0.1.0" (instance (export "seed" (func (result string)))))
  (core module $main
    
    (memory (export "memory") 1)
    (func (export "run") (result i32) i32.const 0))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
