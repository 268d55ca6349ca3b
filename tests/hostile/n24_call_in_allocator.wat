;; 24: its allocator calls the host, while the host hands it a string.
(component
  (import "nodus:gpu/job@0.1.0" (instance $j (export "params" (func (result string))) (export "seed" (func (result u64)))))
  (core func $seed (canon lower (func $j "seed")))
  (core module $alloc
    (import "j" "seed" (func $seed (result i64)))
    (memory (export "memory") 1)
    (func (export "realloc") (param i32 i32 i32 i32) (result i32) (drop (call $seed)) i32.const 64))
  (core instance $alloc (instantiate $alloc (with "j" (instance (export "seed" (func $seed))))))
  (core func $params (canon lower (func $j "params") (memory (core memory $alloc "memory")) (realloc (core func $alloc "realloc"))))
  (core module $main
    (import "j" "params" (func $params (param i32)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (call $params (i32.const 16)) i32.const 0))
  (core instance $main (instantiate $main (with "j" (instance (export "params" (func $params))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
