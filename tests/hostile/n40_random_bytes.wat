;; 40: asks for 1 GiB of randomness.
(component
  (import "wasi:random/random@0.2.0" (instance $r (export "get-random-bytes" (func (param "len" u64) (result (list u8))))))
  (core module $alloc (memory (export "memory") 1) (func (export "realloc") (param i32 i32 i32 i32) (result i32) i32.const 64))
  (core instance $alloc (instantiate $alloc))
  (core func $bytes (canon lower (func $r "get-random-bytes") (memory (core memory $alloc "memory")) (realloc (core func $alloc "realloc"))))
  (core module $main
    (import "r" "bytes" (func $bytes (param i64 i32)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (call $bytes (i64.const 0x40000000) (i32.const 16)) i32.const 0))
  (core instance $main (instantiate $main (with "r" (instance (export "bytes" (func $bytes))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
