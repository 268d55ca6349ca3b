//! Chat templates, rendered as transformers renders them (`utils/chat_template_utils.py`).
//!
//! A template is a stranger's program: it never sees a clock, a file or the network, and its work and output are bounded.
//! Python's `%` on strings is an error here.

mod guard;

use std::collections::BTreeMap;
use std::io::Write;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior, Value, context};
use serde::Serialize as _;
use serde_json::ser::PrettyFormatter;

/// Most work of one rendering: about one unit an instruction and one for each 64 bytes made.
const FUEL_MAX: u64 = 2_000_000;
/// Most bytes of one rendering.
const OUTPUT_BYTES_MAX: usize = 16 << 20;
/// Deepest nesting of loops, blocks and macros.
const RECURSION_MAX: usize = 200;
const NAME: &str = "chat_template";

/// A compiled chat template.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
}

/// Longest source of a template.
const SOURCE_BYTES_MAX: usize = 64 << 10;
/// Parser and renderer recurse, at most once a byte of the source or a unit of fuel; only touched pages cost memory.
const STACK_BYTES: usize = 512 << 20;

/// Runs this on a thread of its own whose stack is deep enough for any template that the limits let through.
fn on_deep_stack<T: Send>(work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat-template".into()).stack_size(STACK_BYTES).spawn_scoped(scope, work);
        let thread = thread.map_err(|error| format!("no thread to run it on: {error}"))?;
        thread.join().unwrap_or_else(|_| Err("the template library gave up on it".into()))
    })
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` are the names it may use: `bos_token`, `eos_token` and so on.
    pub(crate) fn new(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self, String> {
        if source.len() > SOURCE_BYTES_MAX {
            return Err(format!("it has {} bytes, expected at most {SOURCE_BYTES_MAX}", source.len()));
        }
        on_deep_stack(|| Self::compile(source, special_tokens))
    }

    fn compile(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_debug(false);
        environment.set_fuel(Some(FUEL_MAX));
        environment.set_recursion_limit(RECURSION_MAX);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(guard::method);
        environment.set_formatter(guard::print);
        environment.add_filter(guard::WEIGHED, guard::weighed);
        environment.add_filter(guard::STORED, guard::stored_value);
        // strftime_now is left undefined: a rendering is a function of its messages, and templates that look whether it is
        // there fall back to a fixed date.
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|e| chain(&e))?;
        let source = guard::guarded(&without_generation_tags(source), &syntax).map_err(|e| chain(&e))?;
        environment.set_syntax(syntax);
        environment.add_template_owned(NAME, source).map_err(|e| chain(&e))?;
        Ok(Self { environment, special_tokens })
    }

    /// Renders a conversation of (role, content).
    pub(crate) fn render(&self, messages: &[(String, String)], add_generation_prompt: bool) -> Result<String, String> {
        on_deep_stack(|| self.render_here(messages, add_generation_prompt))
    }

    fn render_here(&self, messages: &[(String, String)], add_generation_prompt: bool) -> Result<String, String> {
        let messages: Vec<Value> = messages.iter().map(|(role, content)| context! { role, content }).collect();
        let special_tokens = Value::from_pairs(self.special_tokens.iter().map(|(name, text)| (name.as_str(), text.as_str())));
        let context = context! {
            messages, add_generation_prompt, tools => Value::from(()), documents => Value::from(()), ..special_tokens
        };
        let mut output = Bounded(Vec::new());
        let template = self.environment.get_template(NAME).map_err(|e| chain(&e))?;
        template.render_captured_to(context, &mut output).map_err(|e| chain(&e))?;
        String::from_utf8(output.0).map_err(|_| "the rendering is not UTF-8".into())
    }
}

/// transformers' `{% generation %}` marks the assistant's words and prints its body as it is: a block that is always taken.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        out.push_str(before);
        out.push_str("{%");
        let Some((inner, after)) = tag.split_once("%}") else {
            rest = tag;
            break;
        };
        match inner.trim_matches(['-', '+', ' ', '\t', '\r', '\n']) {
            "generation" => out.push_str(&inner.replace("generation", "if true")),
            "endgeneration" => out.push_str(&inner.replace("endgeneration", "endif")),
            _ => out.push_str(inner),
        }
        out.push_str("%}");
        rest = after;
    }
    out.push_str(rest);
    out
}

fn raise_exception(state: &mut State<'_, '_>, message: Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, guard::weighed(state, message)?.to_string()))
}

/// Python's `json.dumps(x, ensure_ascii=False)`: minijinja's own filter escapes for HTML.
fn to_json(value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let _: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let failed = |e: serde_json::Error| Error::new(ErrorKind::InvalidOperation, e.to_string());
    let mut bytes = Vec::new();
    match indent {
        Some(spaces) => {
            let indent = " ".repeat(spaces.min(16));
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter)).map_err(failed)?;
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)).map_err(failed)?,
    }
    String::from_utf8(bytes).map(Value::from).map_err(|_| Error::from(ErrorKind::InvalidOperation))
}

/// Python's separators: a space after each comma and colon.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Output that ends in an error rather than grow past its limit.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT_BYTES_MAX {
            return Err(std::io::Error::other(format!("the rendering is longer than {OUTPUT_BYTES_MAX} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// An error and its causes on one line.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    crate::error::clip(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(template: &str, messages: &[(&str, &str)], prompt: bool) -> Result<String, String> {
        let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned()), ("eos_token".to_owned(), "</s>".to_owned())]);
        let messages: Vec<_> = messages.iter().map(|(r, c)| ((*r).to_owned(), (*c).to_owned())).collect();
        ChatTemplate::new(template, tokens)?.render(&messages, prompt)
    }

    #[test]
    fn chatml_renders() {
        let template = "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
            {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
        let out = render(template, &[("user", "<hi> & \"you\"")], true).unwrap();
        assert_eq!(out, "<|im_start|>user\n<hi> & \"you\"<|im_end|>\n<|im_start|>assistant\n");
    }

    #[test]
    fn blocks_are_trimmed_and_stripped_as_in_transformers() {
        assert_eq!(render("{% if true %}\n  {% set x = 1 %}\nA{{ x }}\n{% endif %}\n", &[], false).unwrap(), "A1\n");
        assert_eq!(
            render("{{ bos_token }}{% generation %}x{% endgeneration %}\n|{%- generation -%} y {%- endgeneration %}", &[], false).unwrap(),
            "<s>x|y"
        );
    }

    #[test]
    fn python_methods_loop_controls_and_namespaces_work() {
        let template = "{% set ns = namespace(n=0) %}{% for m in messages[1:] %}{% if m.role == 'stop' %}{% break %}{% endif %}\
            {% set ns.n = ns.n + 1 %}{{ m.content.strip().upper() }}{% endfor %}{{ ns.n }}{{ 'a,b'.split(',')[-1] }}\
            {% if tools is not none %}T{% endif %}{% if strftime_now is defined %}S{% endif %}";
        let out = render(template, &[("system", "x"), ("user", " hi "), ("stop", ""), ("user", "no")], false).unwrap();
        assert_eq!(out, "HI1b");
    }

    #[test]
    fn json_is_pythons() {
        assert_eq!(render("{{ {'a': ['<é>', 1, none, true]} | tojson }}", &[], false).unwrap(), r#"{"a": ["<é>", 1, null, true]}"#);
        assert_eq!(render("{{ [1] | tojson(indent=4) }}", &[], false).unwrap(), "[\n    1\n]");
    }

    #[test]
    fn a_template_cannot_loop_grow_or_tell_the_time() {
        let deep =
            "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}{{ c }}{% endfor %}{% endfor %}{% endfor %}";
        assert!(render(deep, &[], false).unwrap_err().contains("fuel"));
        let wide =
            "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}";
        assert!(render(wide, &[], false).unwrap_err().contains("fuel"));
        let long = "{% set s = 'x' * 9000000 %}{{ s }}{{ s }}";
        assert!(render(long, &[], false).unwrap_err().contains("longer than"), "{:?}", render(long, &[], false).map(|s| s.len()));
        assert!(render("{{ strftime_now('%Y') }}", &[], false).unwrap_err().contains("strftime_now"));
        assert!(render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", &[], false).is_err());
    }

    #[test]
    fn values_that_hold_themselves_or_stand_for_too_much_are_refused() {
        let doubled = "{% set a = [1] %}".to_owned() + &"{% set a = [a, a] %}".repeat(50);
        let nested = "{% set ns = namespace(a=1) %}{% for i in range(5000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}";
        for (template, why) in [
            ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", "namespace"),
            ("{% set ns = namespace() %}{%- set b, ns.a = 1, [ns] -%}{{ ns }}", "namespace"),
            ("{% set ns = namespace() %}{% set ns.a | default(ns, true) %}{% endset %}{{ ns }}", "namespace"),
            (nested, "deeply"),
            ("{{ [[1] * 1000000] * 1000000 }}", "operator *"),
            ("{{ 1000000 * [1] }}", "operator *"),
            (&(doubled.clone() + "{{ a }}"), "fuel"),
            (&(doubled.clone() + "{{ a ~ '' }}"), "fuel"),
            (&(doubled.clone() + "{{ '' ~ a }}"), "fuel"),
            (&(doubled.clone() + "{{ '' ~ {'b': [a]}.b[0] }}"), "fuel"),
            (&(doubled.clone() + "{{ a | string }}"), "fuel"),
            (&(doubled.clone() + "{{ a | tojson }}"), "fuel"),
            (&(doubled.clone() + "{{ ','.join(a) }}"), "fuel"),
            (&(doubled.clone() + "{{ a not in 'x' }}"), "fuel"),
            (&(doubled.clone() + "{{ raise_exception(a) }}"), "fuel"),
            (&(doubled.clone() + &doubled.replace('a', "b") + "{{ a == b }}"), "fuel"),
            (
                "{% macro m(x, y, n) %}{% if n %}{{ m([x, x], [y, y], n - 1) }}{% else %}{{ x == y }}{% endif %}{% endmacro %}{{ m(1, 1, 30) }}",
                "fuel",
            ),
            (&(doubled.clone() + &doubled.replace('a', "b") + "{{ a is eq(b) }}"), "fuel"),
            (&(doubled.clone() + &doubled.replace('a', "b") + "{{ a is not in([b]) }}"), "fuel"),
            (
                "{% macro m(x, y, n) %}{% if n %}{{ m([x, x], [y, y], n - 1) }}{% else %}{{ x + [] == y + [] }}{% endif %}{% endmacro %}{{ m(1, 1, 30) }}",
                "fuel",
            ),
            (
                "{% macro m(x, y, n) %}{% if n %}{{ m([x, x], [y, y], n - 1) }}{% else %}{{ [] + x == [] + y }}{% endif %}{% endmacro %}{{ m(1, 1, 30) }}",
                "fuel",
            ),
            (
                &("{% with a = [1] %}{% with b = [1] %}".to_owned()
                    + &"{% with a = [a, a] %}{% with b = [b, b] %}".repeat(40)
                    + "{{ a != b }}"
                    + &"{% endwith %}".repeat(82)),
                "fuel",
            ),
            ("{{ '{:>1000000000}'.format(1) }}", "width"),
            ("{{ '%1000000000d' | format(1) }}", "fuel"),
            ("{{ 'x'.replace('', 'y' * 1000000).replace('', 'y' * 1000000) }}", "fuel"),
        ] {
            let error = render(template, &[], false).map(|text| text.len()).unwrap_err();
            assert!(error.contains(why), "{}: {error}", &template[template.len() - template.len().min(60)..]);
        }
    }

    #[test]
    fn guards_change_nothing_of_an_ordinary_template() {
        for (template, expected) in [
            ("{% set ns = namespace(n=1) %}{%- set ns.n = ns.n + 1, 2 -%}\n {{ ns.n }}", "(2, 2)"),
            ("{% set ns = namespace() %}{% set a, ns.b = 'x', [1] %}{{ a ~ ns.b[0] ~ -1 ~ (2 + 3) ~ a|upper ~ 'p' 'q' }}", "x1-15Xpq"),
            (
                "{{ '-' * 3 ~ 2 * '=' }}{{ 'b' in 'abc' and 'x' not in ['y'] }}{% for c in 'ab' if c in 'b' %}{{ c }}{% endfor %}",
                "---==Trueb",
            ),
            ("{% set ns = namespace() %}{% set ns.t | upper %}a{% endset %}{{ ns.t }}{{ '{:>4}1999'.format(7) }}", "A   71999"),
            ("{{ [1, {'a': none}] }}{{ messages[0].content.split('b')[-1] ~ messages|length }}", "[1, {'a': None}]c1"),
            (
                "{{ 'a' is in(['a']) and 'b' is not in ['a'] and 'a' is eq 'a' and -1 + 2 == 1 and [1]+[2] == [1, 2] }}{{ [1] + [2] }}",
                "True[1, 2]",
            ),
            ("{{ 'a' ~ 1 + 2 if false else 'p' 'q' + messages[0]['role'][:2] + 'x'|upper }}", "pqusX"),
            ("{% raw %}{{ a | b ~ c * d }}{% endraw %}{# a | b * c #}", "{{ a | b ~ c * d }}"),
        ] {
            assert_eq!(render(template, &[("user", "abc")], false).unwrap(), expected, "{template}");
        }
    }

    #[test]
    fn long_and_deep_sources_are_refused_or_run_but_never_end_the_host() {
        let long = "x".repeat(SOURCE_BYTES_MAX + 1);
        assert!(render(&long, &[], false).unwrap_err().contains("expected at most 65536"));
        assert_eq!(render(&long[1..], &[], false).unwrap().len(), SOURCE_BYTES_MAX);
        for part in ["not ", "-", "1+", "(", "[", "a.", "1~", "1 if 1 else "] {
            let deep = format!("{{{{ {}1 }}}}", part.repeat(60_000 / part.len()));
            assert!(render(&deep, &[], false).unwrap_err().contains("expected at most 4096"), "{part}");
        }
        let blocks = "{% if true %}".repeat(2500) + &"{% endif %}".repeat(2500);
        assert!(render(&blocks, &[], false).unwrap_err().contains("recursion limits"));
    }

    /// Made by `fixtures/make_chat_templates.py` with transformers; a null stands for a refusal.
    const FIXTURE: &str = include_str!("../../tests/fixtures/chat_templates.json");

    #[test]
    fn the_idioms_of_the_field_render_as_transformers_renders_them() {
        let cases: Vec<serde_json::Value> = serde_json::from_str(FIXTURE).unwrap();
        assert!(cases.len() > 20);
        for case in cases {
            let messages: Vec<(String, String)> = serde_json::from_value(case["messages"].clone()).unwrap();
            let messages: Vec<_> = messages.iter().map(|(r, c)| (r.as_str(), c.as_str())).collect();
            let ours = render(case["template"].as_str().unwrap(), &messages, case["prompt"].as_bool().unwrap());
            assert_eq!(ours.as_deref().ok(), case["rendering"].as_str(), "{}: {ours:?}", case["name"]);
        }
    }
}
