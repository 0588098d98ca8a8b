/* Backend "perf_elf": trampolines in shared objects that we compose, so that whatever reads ELF knows them.

   An image has a fixed number of slots. Code and unwind data are whole from the start; a function's symbol and source
   position are added when it gets its slot. That is written through the file: the segments that the loader maps are
   never writable, and see it all the same, for nobody has written to their pages.

       (A) ELF header, program headers                            R
       (B) .text            the slots                             RX
       (C) .hash            one empty bucket: never searched      R
           .dynsym          a symbol per slot, undefined until it is let
           .dynstr          names, in order of their letting
           .eh_frame_hdr    table of
           .eh_frame        one CIE, an FDE per slot
       (D) .dynamic                                               RW, for loaders that relocate it
       (E) section headers, .shstrtab, .debug_*                   not loaded

   File offsets are addresses. (C) to (E) stay mapped for writing, shared, until the image is full. (B) is never mapped
   writable.

   Readers cache a file under its build-id, and would keep a copy without the later names: there is none.

   System V gABI, chapters 4 and 5; DWARF 4, sections 3.3, 6.1.2, 6.2 and 7.5. */

#include "pycore_perf_trampoline.h"

#ifndef _PyPerf_STUBS

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* The first image is small, for small programs; each further one is four times as large. */
#define FIRST_NUM_SLOTS 1024
#define MAX_NUM_SLOTS 16384
/* Average room for a name and a file name; a new image begins when either is used up. */
#define NAME_ROOM 96
#define FILE_ROOM 32
/* So much of the file is made ready for stores at a time. */
#define READY_SIZE (64 * 1024)

enum {
    TEXT = 1, HASH, DYNSYM, DYNSTR, EH_FRAME_HDR, EH_FRAME, DYNAMIC,
    DEBUG_ABBREV, DEBUG_ARANGES, DEBUG_INFO, DEBUG_LINE, SHSTRTAB, DEBUG_STR, NUM_SECTIONS
};

struct image {
    struct image *next;         /* made before */
    char *path;
    char *window;               /* (C) to (E); NULL when full */
    size_t window_offset, window_size;
    Elf64_Shdr section[NUM_SECTIONS];
    Elf64_Shdr *section_headers;    /* the same, in the window: never read, for its contents may be lost */
    size_t room[NUM_SECTIONS];
    size_t names_size;          /* of .dynstr's, with the empty one */
    uint32_t num_files;         /* in .debug_line */
    size_t last_file;           /* offset of the last one's name there */
};

static char *_Atomic directories;       /* separated by ':'; a former list is never freed, a thread may read it */
static uid_t directories_user;          /* who chose them */
static atomic_int num_unusable;         /* so many of them have failed */
static struct image *_Atomic images;        /* of this process; none is ever freed */
static atomic_int num_images;

void
_PyPerfElf_SetDirectories(const char *colon_separated)
{
    directories = strdup(colon_separated);
    directories_user = geteuid();
    num_unusable = 0;
}

/* --- DWARF: fixed records, each a template with fields to fill in --- */

/* LEB128 in five bytes, signed or not negative. */
typedef struct { uint8_t byte[5]; } leb128;

static leb128
to_leb128(int32_t value)
{
    leb128 encoded;
    for (int i = 0; i < 5; i++, value >>= 7) {
        encoded.byte[i] = (value & 0x7f) | (i < 4 ? 0x80 : 0);
    }
    return encoded;
}

#define PACKED __attribute__((packed))

static const uint8_t abbreviations[] = {
    1, 0x11, 1,         /* DW_TAG_compile_unit, has children */
        0x03, 0x08,     /* DW_AT_name, DW_FORM_string */
        0x13, 0x0b,     /* DW_AT_language, DW_FORM_data1 */
        0x11, 0x01,     /* DW_AT_low_pc, DW_FORM_addr */
        0x12, 0x07,     /* DW_AT_high_pc, DW_FORM_data8 */
        0x10, 0x17,     /* DW_AT_stmt_list, DW_FORM_sec_offset */
        0, 0,
    2, 0x2e, 0,         /* DW_TAG_subprogram, has none */
        0x11, 0x01,     /* DW_AT_low_pc, DW_FORM_addr */
        0x12, 0x0b,     /* DW_AT_high_pc, DW_FORM_data1 */
        0x3a, 0x06,     /* DW_AT_decl_file, DW_FORM_data4 */
        0x3b, 0x06,     /* DW_AT_decl_line, DW_FORM_data4 */
        0x03, 0x0e,     /* DW_AT_name, DW_FORM_strp */
        0, 0,
    3, 0x80, 0x81, 0x01, 0,         /* DW_TAG_lo_user: a slot that is not let yet, the same in size */
        0x80, 0x40, 0x07,           /* DW_AT_lo_user, DW_FORM_data8 */
        0x81, 0x40, 0x0b,           /* and the next ones, DW_FORM_data1 */
        0x82, 0x40, 0x06,           /* DW_FORM_data4 */
        0x83, 0x40, 0x06,
        0x84, 0x40, 0x06,
        0, 0,
    0,
};

struct PACKED compile_unit {
    uint32_t unit_length;
    uint16_t version;
    uint32_t debug_abbrev_offset;
    uint8_t address_size;
    uint8_t abbreviation;
    char name[7];
    uint8_t language;
    uint64_t low_pc, high_pc;
    uint32_t stmt_list;
};                              /* then a subprogram for each slot, and a zero */

struct PACKED subprogram {
    uint8_t abbreviation;
    uint64_t low_pc;
    uint8_t high_pc;
    uint32_t decl_file, decl_line, name;
};

struct PACKED aranges {
    uint32_t unit_length;
    uint16_t version;
    uint32_t debug_info_offset;
    uint8_t address_size, segment_size;
    uint32_t padding;
    uint64_t address, length, end[2];
};

struct PACKED line_header {
    uint32_t unit_length;
    uint16_t version;
    uint32_t header_length;
    uint8_t minimum_instruction_length, maximum_operations, default_is_stmt;
    int8_t line_base;
    uint8_t line_range, opcode_base, standard_opcode_lengths[12];
    uint8_t end_of_directories, end_of_files;
};

struct PACKED define_file {
    uint8_t extended;           /* 0 */
    uint8_t length;             /* of what follows; LEB128, but elfutils knows only one byte */
    uint8_t opcode;             /* DW_LNE_define_file */
};                              /* then the name, a NUL, and three zeros: directory, time, length */
#define LONGEST_FILE_NAME (0x7f - 1 - 4)    /* of a longer one the tail is given */

struct PACKED line_sequence {
    uint8_t set_address[3];
    uint64_t address;
    uint8_t set_file;
    leb128 file;
    uint8_t advance_line;
    leb128 line;
    uint8_t copy, advance_pc;
    leb128 code_size;
    uint8_t end_sequence[3];
};

/* --- Composition --- */

static char *
at(const struct image *image, int section)
{
    return image->window + image->section[section].sh_offset - image->window_offset;
}

/* For `size` more bytes in a section that has `used`. */
static void
make_ready(const struct image *image, int section, size_t used, size_t size)
{
    size_t begin = _PyPerf_ALIGN(used, READY_SIZE);
    if (used + size > begin) {
        size_t end = Py_MIN(_PyPerf_ALIGN(used + size, READY_SIZE), image->room[section]);
        _PyPerfWindow_MakeReady(at(image, section) + begin, end - begin);
    }
}

/* (A) and (B); -1 with errno. */
static int
write_code(const struct image *image, int fd, size_t num_slots, size_t slot_size)
{
    const char *reason;
    const _PyPerf_Template *template = _PyPerf_GetTemplate(&reason);
    const Elf64_Shdr *section = image->section;
    const uint64_t page_size = sysconf(_SC_PAGESIZE);
    const uint64_t rodata = section[HASH].sh_offset;
    const uint64_t rodata_size = section[EH_FRAME].sh_offset + section[EH_FRAME].sh_size - rodata;
    const struct {
        Elf64_Ehdr ehdr;
        Elf64_Phdr phdr[7];
    } head = {
        {
            .e_ident = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, template->elf_class, template->elf_data, EV_CURRENT},
            .e_type = ET_DYN, .e_machine = template->e_machine, .e_version = EV_CURRENT, .e_flags = template->e_flags,
            .e_phoff = sizeof(head.ehdr),
            .e_shoff = image->window_offset + ((char *)image->section_headers - image->window),
            .e_ehsize = sizeof(head.ehdr), .e_phentsize = sizeof(head.phdr[0]), .e_phnum = Py_ARRAY_LENGTH(head.phdr),
            .e_shentsize = sizeof(*section), .e_shnum = NUM_SECTIONS, .e_shstrndx = SHSTRTAB,
        },
        {
            {PT_LOAD, PF_R, 0, 0, 0, sizeof(head), sizeof(head), page_size},
            {PT_LOAD, PF_R | PF_X, section[TEXT].sh_offset, section[TEXT].sh_offset, section[TEXT].sh_offset,
             section[TEXT].sh_size, section[TEXT].sh_size, page_size},
            {PT_LOAD, PF_R, rodata, rodata, rodata, rodata_size, rodata_size, page_size},
            {PT_LOAD, PF_R | PF_W, section[DYNAMIC].sh_offset, section[DYNAMIC].sh_offset, section[DYNAMIC].sh_offset,
             section[DYNAMIC].sh_size, section[DYNAMIC].sh_size, page_size},
            {PT_DYNAMIC, PF_R | PF_W, section[DYNAMIC].sh_offset, section[DYNAMIC].sh_offset,
             section[DYNAMIC].sh_offset, section[DYNAMIC].sh_size, section[DYNAMIC].sh_size, 8},
            {PT_GNU_EH_FRAME, PF_R, section[EH_FRAME_HDR].sh_offset, section[EH_FRAME_HDR].sh_offset,
             section[EH_FRAME_HDR].sh_offset, section[EH_FRAME_HDR].sh_size, section[EH_FRAME_HDR].sh_size, 4},
            /* Without it loaders make every stack executable, or refuse. */
            {PT_GNU_STACK, PF_R | PF_W, 0, 0, 0, 0, 0, 16},
        },
    };
    const size_t piece_size = FIRST_NUM_SLOTS * slot_size;
    char *piece = calloc(1, piece_size);
    if (piece == NULL) {
        return -1;
    }
    _PyPerf_FillSlots(piece, piece_size, slot_size);
    bool done = pwrite(fd, &head, sizeof(head), 0) == sizeof(head);
    for (size_t i = 0; done && i < num_slots; i += FIRST_NUM_SLOTS) {
        done = pwrite(fd, piece, piece_size, section[TEXT].sh_offset + i * slot_size) == (ssize_t)piece_size;
    }
    free(piece);
    return done ? 0 : -1;
}

/* (C) to (E). */
static void
compose(struct image *image, size_t num_slots, size_t slot_size)
{
    static const char *const names[NUM_SECTIONS] = {
        "", ".text", ".hash", ".dynsym", ".dynstr", ".eh_frame_hdr", ".eh_frame", ".dynamic",
        ".debug_abbrev", ".debug_aranges", ".debug_info", ".debug_line", ".shstrtab", ".debug_str",
    };
    const char *reason;
    const _PyPerf_Template *template = _PyPerf_GetTemplate(&reason);
    Elf64_Shdr *section = image->section;
    for (int i = HASH; i <= DEBUG_INFO; i++) {
        make_ready(image, i, 0, i == DYNSTR ? 1 : section[i].sh_size);
    }
    make_ready(image, DEBUG_LINE, 0, sizeof(struct line_header));

    /* nbucket, nchain; the bucket and the chain stay empty. */
    uint64_t hash[2] = {1, num_slots + 1};
    for (size_t i = 0; i < 2; i++) {
        char *entry = at(image, HASH) + i * template->hash_entry_size;
        uint32_t word = (uint32_t)hash[i];
        memcpy(entry, template->hash_entry_size == 8 ? (void *)&hash[i] : (void *)&word, template->hash_entry_size);
    }
    Elf64_Sym *symbols = (Elf64_Sym *)at(image, DYNSYM);
    for (size_t i = 1; i <= num_slots; i++) {
        symbols[i].st_info = ELF64_ST_INFO(STB_GLOBAL, STT_NOTYPE);
    }
    _PyPerf_CodeRegions regions = {
        .code_offset = (int32_t)((int64_t)section[TEXT].sh_offset - (int64_t)section[EH_FRAME].sh_offset),
        .code_size = template->code_size, .spacing = slot_size, .num_regions = num_slots,
    };
    elf_init_ehframe_perf((uint8_t *)at(image, EH_FRAME), &regions);
    elf_init_ehframe_hdr_perf((uint8_t *)at(image, EH_FRAME_HDR),
                              (int32_t)((int64_t)section[EH_FRAME_HDR].sh_offset - (int64_t)section[EH_FRAME].sh_offset),
                              &regions);
    Elf64_Dyn dynamic[] = {
        {DT_HASH, {section[HASH].sh_offset}},
        {DT_STRTAB, {section[DYNSTR].sh_offset}}, {DT_STRSZ, {section[DYNSTR].sh_size}},
        {DT_SYMTAB, {section[DYNSYM].sh_offset}}, {DT_SYMENT, {sizeof(Elf64_Sym)}},
        {DT_NULL, {0}},
    };
    static_assert(sizeof(dynamic) == 6 * sizeof(Elf64_Dyn), "section_sizes() knows");
    memcpy(at(image, DYNAMIC), dynamic, sizeof(dynamic));

    const uint64_t text = section[TEXT].sh_offset, text_size = section[TEXT].sh_size;
    memcpy(at(image, DEBUG_ABBREV), abbreviations, sizeof(abbreviations));
    *(struct aranges *)at(image, DEBUG_ARANGES) = (struct aranges){
        .unit_length = sizeof(struct aranges) - 4, .version = 2, .address_size = 8, .address = text, .length = text_size,
    };
    *(struct compile_unit *)at(image, DEBUG_INFO) = (struct compile_unit){
        .unit_length = section[DEBUG_INFO].sh_size - 4, .version = 4, .address_size = 8,
        .abbreviation = 1, .name = "Python", .language = 0x14 /* DW_LANG_Python */, .low_pc = text, .high_pc = text_size,
    };
    struct subprogram *subprograms = (struct subprogram *)(at(image, DEBUG_INFO) + sizeof(struct compile_unit));
    for (size_t i = 0; i < num_slots; i++) {
        subprograms[i].abbreviation = 3;
    }
    *(struct line_header *)at(image, DEBUG_LINE) = (struct line_header){
        .unit_length = sizeof(struct line_header) - 4, .version = 4,
        .header_length = sizeof(struct line_header) - offsetof(struct line_header, minimum_instruction_length),
        .minimum_instruction_length = 1, .maximum_operations = 1, .default_is_stmt = 1, .line_base = -5,
        .line_range = 14, .opcode_base = 13, .standard_opcode_lengths = {0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1},
    };
    for (int i = 1, name = 1; i < NUM_SECTIONS; i++) {
        section[i].sh_name = name;
        name += sprintf(at(image, SHSTRTAB) + name, "%s", names[i]) + 1;
        section[SHSTRTAB].sh_size = name;
    }
    section[DEBUG_LINE].sh_size = sizeof(struct line_header);
    memcpy(image->section_headers, section, sizeof(image->section));
}

/* Lay the sections out; returns the size of the file. Their sizes are the room for them: the debugging information's
   grows later. */
static size_t
lay_out(struct image *image, size_t num_slots, size_t slot_size)
{
    Elf64_Shdr *section = image->section;
    const char *reason;
    const _PyPerf_Template *template = _PyPerf_GetTemplate(&reason);
    const uint64_t page_size = sysconf(_SC_PAGESIZE);
    const struct { uint32_t type; uint64_t flags, size, alignment, entry_size; uint32_t link, info; } sections[] = {
        [TEXT] = {SHT_PROGBITS, SHF_ALLOC | SHF_EXECINSTR, num_slots * slot_size, page_size, 0, 0, 0},
        [HASH] = {SHT_HASH, SHF_ALLOC, (num_slots + 4) * template->hash_entry_size, page_size,
                  template->hash_entry_size, DYNSYM, 0},
        [DYNSYM] = {SHT_DYNSYM, SHF_ALLOC, (num_slots + 1) * sizeof(Elf64_Sym), 8, sizeof(Elf64_Sym), DYNSTR, 1},
        [DYNSTR] = {SHT_STRTAB, SHF_ALLOC, num_slots * NAME_ROOM, 1, 0, 0, 0},
        [EH_FRAME_HDR] = {SHT_PROGBITS, SHF_ALLOC, _PyPerf_EH_FRAME_HDR_SIZE(num_slots), 8, 0, 0, 0},
        [EH_FRAME] = {SHT_PROGBITS, SHF_ALLOC, elf_ehframe_size_perf(num_slots), 8, 0, 0, 0},
        [DYNAMIC] = {SHT_DYNAMIC, SHF_ALLOC | SHF_WRITE, 6 * sizeof(Elf64_Dyn), page_size, sizeof(Elf64_Dyn), DYNSTR, 0},
        [DEBUG_ABBREV] = {SHT_PROGBITS, 0, sizeof(abbreviations), page_size, 0, 0, 0},
        [DEBUG_ARANGES] = {SHT_PROGBITS, 0, sizeof(struct aranges), 8, 0, 0, 0},
        [DEBUG_INFO] = {SHT_PROGBITS, 0,
                        sizeof(struct compile_unit) + num_slots * sizeof(struct subprogram) + 1, 8, 0, 0, 0},
        [DEBUG_LINE] = {SHT_PROGBITS, 0,
                        sizeof(struct line_header) + num_slots * (sizeof(struct line_sequence) + FILE_ROOM), 8, 0, 0, 0},
        [SHSTRTAB] = {SHT_STRTAB, 0, 128, 1, 0, 0, 0},
    };
    uint64_t offset = page_size;
    for (int i = 1; i < DEBUG_STR; i++) {
        offset = _PyPerf_ALIGN(offset, sections[i].alignment);
        section[i] = (Elf64_Shdr){
            .sh_type = sections[i].type, .sh_flags = sections[i].flags, .sh_offset = offset,
            .sh_addr = sections[i].flags & SHF_ALLOC ? offset : 0, .sh_size = sections[i].size,
            .sh_link = sections[i].link, .sh_info = sections[i].info,
            .sh_addralign = sections[i].alignment, .sh_entsize = sections[i].entry_size,
        };
        image->room[i] = sections[i].size;
        offset += sections[i].size;
    }
    /* The debugging information's names are the symbols'. */
    section[DEBUG_STR] = section[DYNSTR];
    section[DEBUG_STR].sh_type = SHT_PROGBITS;
    section[DEBUG_STR].sh_flags = SHF_MERGE | SHF_STRINGS;
    section[DEBUG_STR].sh_addr = 0;
    section[DEBUG_STR].sh_entsize = 1;
    offset = _PyPerf_ALIGN(offset, 8) + NUM_SECTIONS * sizeof(Elf64_Shdr);
    return _PyPerf_ALIGN(offset, page_size);
}

/* --- Files --- */

/* A directory whose name ends in the number of a user is another for each, and a process may become another user. */
static void
name_directory(const char *chosen, char *path)
{
    char number[16];
    size_t size = strlen(chosen), number_size = sprintf(number, "-%u", (unsigned)directories_user);
    if (size > number_size && strcmp(chosen + size - number_size, number) == 0) {
        snprintf(path, PATH_MAX, "%.*s-%u", (int)(size - number_size), chosen, (unsigned)geteuid());
    }
    else {
        snprintf(path, PATH_MAX, "%s", chosen);
    }
}

/* Whatever the umask is. */
static int
make_directory(const char *path)
{
    return mkdir(path, 0700) == 0 ? chmod(path, 0700) : -1;
}

/* Create a file of an unused name in `directory`, which must be ours alone. Returns its descriptor, or -1 with errno. It
   is called .so only when it is whole. */
static int
create_file(const char *directory, char *path)
{
    snprintf(path, PATH_MAX, "%s", directory);
    for (char *slash = path; (slash = strchr(slash + 1, '/')) != NULL; *slash = '/') {
        *slash = '\0';
        make_directory(path);
    }
    struct stat st;
    if ((make_directory(path) < 0 && errno != EEXIST) || lstat(path, &st) < 0) {
        return -1;
    }
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 022) != 0) {
        errno = EPERM;
        return -1;
    }
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(path + strlen(path), PATH_MAX - strlen(path), "/%d-%d-%llx.new", (int)_PyPerf_ProcessId(),
             atomic_fetch_add(&num_images, 1) + 1, (long long)now.tv_sec * 1000000000 + now.tv_nsec);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd >= 0) {
        (void)!fchmod(fd, 0600);
    }
    return fd;
}

static void
release_window(struct image *image)
{
    if (image->window != NULL) {
        _PyPerfWindow_Unmap(image->window, image->window_size);
        image->window = NULL;
    }
}

/* Compose and load an image in `directory`. On failure *out_reason, the file is gone. */
static int
make_image(const char *directory, size_t num_slots, _PyPerf_CodeMemory *out_memory, const char **out_reason)
{
    const char *reason;
    const size_t slot_size = _PyPerf_ALIGN(_PyPerf_GetTemplate(&reason)->code_size, 16);
    void *handle = NULL;
    char new_path[PATH_MAX];
    const char *present_path = new_path;
    int fd = create_file(directory, new_path);
    if (fd < 0) {
        *out_reason = errno == EPERM ? "it is not a directory of this user alone" : strerror(errno);
        return -1;
    }
    struct image *image = calloc(1, sizeof(*image) + strlen(new_path) + 1);
    if (image == NULL) {
        *out_reason = strerror(errno);
        unlink(new_path);
        close(fd);
        return -1;
    }
    char *path = image->path = strcpy((char *)(image + 1), new_path);
    strcpy(strrchr(path, '.'), ".so");
    const Elf64_Shdr *section = image->section;
    const size_t size = lay_out(image, num_slots, slot_size);
    const size_t code_end = section[HASH].sh_offset;
    _PyPerf_HeldSignals held;
    _PyPerf_HoldSignals(&held);
    /* Allocated, for a store into a hole of a full file system is a SIGBUS. */
    do {
        errno = posix_fallocate(fd, 0, size);
    } while (errno == EINTR);       /* a signal of the program's */
    if (errno == 0) {
        image->window = _PyPerfWindow_Map(fd, code_end, size - code_end);
    }
    image->names_size = 1;
    image->window_offset = code_end;
    image->window_size = size - code_end;
    image->section_headers = (Elf64_Shdr *)(image->window + image->window_size - sizeof(image->section));
    int written = image->window == NULL ? -1 : write_code(image, fd, num_slots, slot_size);
    _PyPerf_LetSignals(&held);
    if (written < 0) {
        *out_reason = strerror(errno);
        goto error;
    }
    compose(image, num_slots, slot_size);

    if (rename(new_path, path) < 0) {
        *out_reason = strerror(errno);
        goto error;
    }
    present_path = path;
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    struct link_map *map;
    if (handle == NULL || dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) {
        void *page = mmap(NULL, 1, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
        *out_reason = page == MAP_FAILED ? _PyPerf_FORBIDDEN : dlerror();
        goto error;
    }
    close(fd);
    /* The loader's look at a page has brought sixteen. */
    madvise((void *)map->l_addr, section[DYNAMIC].sh_offset, MADV_DONTNEED);
    const uintptr_t base = map->l_addr + section[TEXT].sh_offset;
    _PyPerfWindow_Guard((void *)base, code_end - section[TEXT].sh_offset, slot_size);
    *out_memory = (_PyPerf_CodeMemory){
        .base = base, .slot_size = slot_size, .num_slots = num_slots, .image = image,
    };
    image->next = images;
    while (!atomic_compare_exchange_weak(&images, &image->next, image)) {
    }
    return 0;

error:
    release_window(image);
    unlink(present_path);
    close(fd);
    free(image);
    return -1;
}

/* --- The backend --- */

static int
elf_open(void)
{
    return 0;
}

static int
elf_reserve(_PyPerf_CodeMemory *out_memory)
{
    char first_failure[256] = "";
    size_t num_slots = FIRST_NUM_SLOTS;
    for (int i = num_images; i > 0 && num_slots < MAX_NUM_SLOTS; i--) {
        num_slots *= 4;
    }
    char *list = directories == NULL ? NULL : strdup(directories), *rest = list, *chosen;
    if (list == NULL) {
        return _PyPerf_Fail("no directory for images is known, or no memory for its name");
    }
    for (int i = 0, tried = num_unusable; (chosen = strsep(&rest, ":")) != NULL; i++) {
        char directory[PATH_MAX];
        const char *reason;
        if (i < tried) {
            continue;
        }
        name_directory(chosen, directory);
        if (make_image(directory, num_slots, out_memory, &reason) == 0) {
            if (i > tried) {
                _PyPerf_Fail("cannot make images in %s; they are in %s", first_failure, directory);
                num_unusable = i;
            }
            free(list);
            return 0;
        }
        if (i == tried) {
            snprintf(first_failure, sizeof(first_failure), "%.120s: %s", directory, reason);
        }
    }
    free(list);
    return _PyPerf_Fail("cannot make images in %s, nor in any other directory", first_failure);
}

static int
elf_publish(const _PyPerf_CodeMemory *memory, uintptr_t slot, PyCodeObject *code)
{
    static char name[_PyPerf_NAME_MAX], path_buffer[_PyPerf_NAME_MAX];
    const char *reason;
    const size_t code_size = _PyPerf_GetTemplate(&reason)->code_size;
    struct image *image = memory->image;
    if (image->window == NULL) {
        return _PyPerf_FULL;
    }
    Elf64_Shdr *section = image->section;
    const size_t index = (slot - memory->base) / memory->slot_size;
    const uint64_t address = section[TEXT].sh_offset + index * memory->slot_size;
    const size_t name_size = _PyPerf_FormatName(code, name) + 1;
    size_t path_size = _PyPerf_EncodePath(code->co_filename, path_buffer, sizeof(path_buffer) - 1) + 1;
    name[name_size - 1] = path_buffer[path_size - 1] = '\0';
    const char *path = path_buffer;
    if (path_size == 1) {       /* gdb aborts on a file without a name */
        path = "?";
        path_size = 2;
    }
    if (path_size > LONGEST_FILE_NAME + 1) {
        path += path_size - (LONGEST_FILE_NAME + 1);
        path_size = LONGEST_FILE_NAME + 1;
    }

    const bool same_file = image->num_files > 0 && strcmp(at(image, DEBUG_LINE) + image->last_file, path) == 0;
    const size_t line_size = sizeof(struct line_sequence) + (same_file ? 0 : sizeof(struct define_file) + path_size + 3);
    if (image->names_size + name_size > section[DYNSTR].sh_size
        || section[DEBUG_LINE].sh_size + line_size > image->room[DEBUG_LINE])
    {
        release_window(image);
        return _PyPerf_FULL;
    }

    make_ready(image, DYNSTR, image->names_size, name_size);
    make_ready(image, DEBUG_LINE, section[DEBUG_LINE].sh_size, line_size);
    memcpy(at(image, DYNSTR) + image->names_size, name, name_size);
    char *line = at(image, DEBUG_LINE) + section[DEBUG_LINE].sh_size;
    if (!same_file) {
        struct define_file define = {.length = 1 + path_size + 3, .opcode = 3};
        line = mempcpy(line, &define, sizeof(define));
        image->last_file = line - at(image, DEBUG_LINE);
        line = (char *)mempcpy(line, path, path_size) + 3;
        image->num_files++;
    }
    struct line_sequence sequence = {
        .set_address = {0, 9, 2}, .address = address, .set_file = 4, .file = to_leb128(image->num_files),
        .advance_line = 3, .line = to_leb128(code->co_firstlineno - 1), .copy = 1,
        .advance_pc = 2, .code_size = to_leb128(code_size), .end_sequence = {0, 1, 1},
    };
    memcpy(line, &sequence, sizeof(sequence));

    /* The length after what it is the length of, and the section's before the unit's: a reader finds whole entries. */
    atomic_thread_fence(memory_order_release);
    image->section_headers[DEBUG_LINE].sh_size = section[DEBUG_LINE].sh_size += line_size;
    atomic_thread_fence(memory_order_release);
    ((struct line_header *)at(image, DEBUG_LINE))->unit_length = section[DEBUG_LINE].sh_size - 4;

    struct subprogram *subprogram = (struct subprogram *)(at(image, DEBUG_INFO) + sizeof(struct compile_unit)) + index;
    struct subprogram let = {
        .abbreviation = 3, .low_pc = address, .high_pc = code_size,
        .decl_file = image->num_files, .decl_line = code->co_firstlineno, .name = image->names_size,
    };
    memcpy(subprogram, &let, sizeof(let));
    __atomic_store_n(&subprogram->abbreviation, 2, __ATOMIC_RELEASE);

    /* The symbol becomes defined by its first word, stored last. */
    Elf64_Sym *symbol = (Elf64_Sym *)at(image, DYNSYM) + index + 1;
    Elf64_Sym defined = {
        .st_name = image->names_size, .st_info = ELF64_ST_INFO(STB_GLOBAL, STT_FUNC), .st_shndx = TEXT,
        .st_value = address, .st_size = code_size,
    };
    uint64_t first_word;
    memcpy(&first_word, &defined, 8);
    image->names_size += name_size;
    symbol->st_value = defined.st_value;
    symbol->st_size = defined.st_size;
    __atomic_store_n((uint64_t *)symbol, first_word, __ATOMIC_RELEASE);
    if (_PyPerfWindow_IsLost(image->window)) {
        release_window(image);
        return _PyPerf_Fail("%s was truncated", image->path);
    }
    if (index + 1 == memory->num_slots) {
        release_window(image);
    }
    return 0;
}

/* The child's mappings of the window are gone (MADV_DONTFORK), and nothing is written through them: an inherited arena
   gets no new function. */
static void
elf_after_fork(void)
{
    images = NULL;
    num_images = 0;
}

static void
elf_close(void)
{
}

static const char *
elf_path(size_t index)
{
    const struct image *image = images;
    while (image != NULL && index-- > 0) {
        image = image->next;
    }
    return image == NULL ? NULL : image->path;
}

const _PyPerf_Backend _PyPerf_elf_backend = {
    .name = "perf_elf",
    .inherits = true,
    .open = elf_open,
    .reserve = elf_reserve,
    .publish = elf_publish,
    .retire = _PyPerf_RetirePages,
    .after_fork = elf_after_fork,
    .close = elf_close,
    .path = elf_path,
};

#endif
