;; 24: calls the host after it returned.
(component
  (import "nodus:gpu/job@0.1.0" (instance $j (export "seed" (func (result u64)))))
  (core func $seed (canon lower (func $j "seed")))
  (core module $main
    (import "j" "seed" (func $seed (result i64)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) i32.const 0)
    (func (export "after") (param i32) (drop (call $seed))))
  (core instance $main (instantiate $main (with "j" (instance (export "seed" (func $seed))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")) (post-return (core func $main "after")))))
