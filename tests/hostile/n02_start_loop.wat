;; 2: spins while it is instantiated.
(component
  (core module $s (func $f (loop (br 0))) (start $f)) (core instance (instantiate $s))
  (core module $main
    
    (memory (export "memory") 1)
    (func (export "run") (result i32) i32.const 0))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
