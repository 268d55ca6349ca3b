;; 10: grows its memory until it is refused, and cannot do without.
(component
  
  (core module $main
    
    (memory (export "memory") 1)
    (func (export "run") (result i32) (loop (if (i32.eq (memory.grow (i32.const 16)) (i32.const -1)) (then unreachable)) (br 0)) i32.const 0))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
