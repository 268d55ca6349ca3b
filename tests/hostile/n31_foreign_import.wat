;; 31: an import that no training job has.
(component
  (import "wasi:http/outgoing-handler@0.2.0" (instance))
  (core module $main
    
    (memory (export "memory") 1)
    (func (export "run") (result i32) i32.const 0))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
