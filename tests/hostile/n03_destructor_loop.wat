;; 3: spins in the destructor of its own resource.
(component
  (core module $d (func (export "dtor") (param i32) (loop (br 0))))
  (core instance $d (instantiate $d))
  (type $r (resource (rep i32) (dtor (core func $d "dtor"))))
  (core func $new (canon resource.new $r))
  (core func $drop (canon resource.drop $r))
  (core module $main
    (import "r" "new" (func $new (param i32) (result i32))) (import "r" "drop" (func $drop (param i32)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (call $drop (call $new (i32.const 1))) i32.const 0))
  (core instance $main (instantiate $main (with "r" (instance (export "new" (func $new)) (export "drop" (func $drop))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
