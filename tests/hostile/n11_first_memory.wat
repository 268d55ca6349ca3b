;; 11: wants 4 GiB from the start.
(component
  (core module $main (memory (export "memory") 65536) (func (export "run") (result i32) i32.const 0))
  (core instance $main (instantiate $main))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
