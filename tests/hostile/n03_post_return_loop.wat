;; 3: spins after it returned.
(component
  (core module $main
    (memory (export "memory") 1)
    (func (export "run") (result i32) i32.const 0)
    (func (export "after") (param i32) (loop (br 0))))
  (core instance $main (instantiate $main))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")) (post-return (core func $main "after")))))
