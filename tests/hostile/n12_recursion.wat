;; 12: recursion without an end.
(component
  
  (core module $main
    (func $f (result i32) (call $f))
    (memory (export "memory") 1)
    (func (export "run") (result i32) call $f))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
