;; 18: its allocator traps.
(component
  (import "nodus:gpu/job@0.1.0" (instance $j (export "params" (func (result string)))))
  (core module $alloc (memory (export "memory") 1) (func (export "realloc") (param i32 i32 i32 i32) (result i32) unreachable))
  (core instance $alloc (instantiate $alloc))
  (core func $params (canon lower (func $j "params") (memory (core memory $alloc "memory")) (realloc (core func $alloc "realloc"))))
  (core module $main
    (import "j" "params" (func $params (param i32)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (call $params (i32.const 16)) i32.const 0))
  (core instance $main (instantiate $main (with "j" (instance (export "params" (func $params))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
