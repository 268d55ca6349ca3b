;; 11: grows its table until it is refused.
(component
  
  (core module $main
    (table $t 0 funcref)
    (memory (export "memory") 1)
    (func (export "run") (result i32) (loop (if (i32.eq (table.grow $t (ref.null func) (i32.const 1000)) (i32.const -1)) (then unreachable)) (br 0)) i32.const 0))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
